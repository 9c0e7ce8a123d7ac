-- Give a lock back, if it still is the holder's.
-- KEYS: 1 lock
-- ARGV: 1 holder
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 1
