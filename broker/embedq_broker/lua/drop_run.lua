-- Forget a run that is over, with its results, and give back their part of the backlog.
-- KEYS: 1 run hash, 2 results stream, 3 dead letters stream, 4 runs sorted set, 5 bytes hash, 6 held hash
-- ARGV: 1 run id, 2... statuses in which it may be forgotten
-- Returns {1} when it is gone, {0, status} when it is not over.
local status = redis.call('HGET', KEYS[1], 'status')
if status then
  local over = false
  for i = 2, #ARGV do over = over or ARGV[i] == status end
  if not over then return {0, status} end
end
redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
redis.call('ZREM', KEYS[4], ARGV[1])
drop_held(KEYS[5], KEYS[6], 'results:' .. ARGV[1])
drop_held(KEYS[5], KEYS[6], 'dead:' .. ARGV[1])
return {1}
