-- Write down which dead letters are about to be moved, unless a range is planned already.
-- KEYS: 1 run hash
-- ARGV: 1 range
-- Returns the planned range, or nothing if the run is gone.
if redis.call('EXISTS', KEYS[1]) == 0 then return false end
redis.call('HSETNX', KEYS[1], 'drain_range', ARGV[1])
return redis.call('HGET', KEYS[1], 'drain_range')
