-- Take a lock if nobody holds it, or hold it longer if it is ours.
-- KEYS: 1 lock
-- ARGV: 1 holder, 2 time to live in ms
-- Returns 1 if the holder has it now.
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
