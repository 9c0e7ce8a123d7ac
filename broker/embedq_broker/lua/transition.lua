-- Move a run from one of the named states to another.
-- KEYS: 1 run hash, 2 events stream
-- ARGV: 1 new status, 2 error text ('' leaves it), 3 whether the new status is final (0/1), 4... allowed current statuses
-- Returns {1, new status} | {0, current status} | {-1} for an unknown run.
local current = redis.call('HGET', KEYS[1], 'status')
if not current then return {-1} end
for i = 4, #ARGV do
  if ARGV[i] == current then
    redis.call('HSET', KEYS[1], 'status', ARGV[1], 'updated_ms', now_ms())
    if ARGV[2] ~= '' then redis.call('HSET', KEYS[1], 'error', ARGV[2]) end
    if ARGV[1] == 'cancelling' then
      -- Nothing more comes in: what was sent so far is what must settle.
      redis.call('HSET', KEYS[1], 'input_closed', 1)
      settle(KEYS[1])
    end
    if ARGV[3] == '1' then retire(KEYS[1]) end
    announce(KEYS[2], {[KEYS[1]] = true})
    return {1, redis.call('HGET', KEYS[1], 'status')}
  end
end
return {0, current}
