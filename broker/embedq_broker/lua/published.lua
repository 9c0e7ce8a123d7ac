-- A committed file has its final name and its manifest line: drop the commit record, count the file once.
-- KEYS: 1 commits stream, 2 run hash
-- ARGV: 1 id of the commit record
-- Returns 1 if this call dropped it, 0 if another did before.
local dropped = redis.call('XDEL', KEYS[1], ARGV[1])
if dropped == 1 and redis.call('EXISTS', KEYS[2]) == 1 then
  redis.call('HINCRBY', KEYS[2], 'published_files', 1)
  redis.call('HSET', KEYS[2], 'updated_ms', now_ms())
end
return dropped
