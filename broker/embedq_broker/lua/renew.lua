-- Extend leases that are still this consumer's; never takes one back from another.
-- KEYS: 1 stream
-- ARGV: 1 group, 2 consumer, 3 idle time to set in ms (0 renews; above the lease releases), 4... ids
-- Returns the ids that another consumer holds now. One that nobody holds may just have been committed.
local lost = {}
for i = 4, #ARGV do
  local p = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1)[1]
  if p and p[2] == ARGV[2] then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[i], 'IDLE', ARGV[3], 'JUSTID')
  elseif p then
    lost[#lost + 1] = ARGV[i]
  end
end
return lost
