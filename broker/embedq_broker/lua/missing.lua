-- Documents of a run that have no outcome although the queue holds nothing more: lost by the server or by hand.
-- Every commit moves documents from one stream to the next in one step, so in between they are never nowhere.
-- KEYS: 1 run hash, 2... streams with the group of the same position in ARGV
-- ARGV: 1... groups
-- Returns their number; 0 while the queue holds anything, or the run's input is still open.
local r = redis.call('HMGET', KEYS[1], 'input_closed', 'input', 'succeeded', 'failed', 'skipped')
if r[1] ~= '1' then return 0 end
for i = 2, #KEYS do
  if redis.call('XLEN', KEYS[i]) > 0 then return 0 end
  local pending = redis.pcall('XPENDING', KEYS[i], ARGV[i - 1])
  if not pending.err and pending[1] > 0 then return 0 end
end
return tonumber(r[2]) - tonumber(r[3]) - tonumber(r[4]) - tonumber(r[5])
