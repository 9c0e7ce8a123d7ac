-- Dead letters were written to a file: drop them, if the range still is the one that was planned.
-- KEYS: 1 dead letters stream, 2 run hash
-- ARGV: 1 the planned range, 2... ids
-- Returns the number dropped.
if redis.call('HGET', KEYS[2], 'drain_range') ~= ARGV[1] then return 0 end
local dropped = 0
for i = 2, #ARGV do dropped = dropped + redis.call('XDEL', KEYS[1], ARGV[i]) end
redis.call('HDEL', KEYS[2], 'drain_range')
return dropped
