-- Bind a queue to one model, or compare with the model it is bound to.
-- KEYS: 1 model hash
-- ARGV: 1 fingerprint, then field value pairs to store beside it
-- Returns the fingerprint the queue is bound to after the call.
local bound = redis.call('HGET', KEYS[1], 'fingerprint')
if bound then return bound end
redis.call('HSET', KEYS[1], 'fingerprint', ARGV[1], unpack(ARGV, 2))
return ARGV[1]
