-- Replace a record, if it still is what the caller read.
-- KEYS: 1 record
-- ARGV: 1 what the caller read, 2 the new record, 3 time to live in ms, or 0 to keep it for good
-- Returns 1 if it was replaced.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
if ARGV[3] ~= '0' then redis.call('PEXPIRE', KEYS[1], ARGV[3]) end
return 1
