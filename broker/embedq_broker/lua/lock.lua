-- Take a lock if nobody holds it.
-- KEYS: 1 lock
-- ARGV: 1 holder, 2 time to live in ms
-- Returns 1 if it was taken.
return redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) and 1 or 0
