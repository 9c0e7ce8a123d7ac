-- Release every lease of a consumer known to be dead, so that others need not wait for the lease to run out.
-- KEYS: 1 stream
-- ARGV: 1 group, 2 consumer, 3 idle time to set in ms
-- Returns the number of entries released.
local released = 0
local from = '-'
while true do
  local page = redis.call('XPENDING', KEYS[1], ARGV[1], from, '+', 1000, ARGV[2])
  for _, p in ipairs(page) do
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, p[1], 'IDLE', ARGV[3], 'JUSTID')
    released = released + 1
  end
  if #page < 1000 then break end
  from = '(' .. page[#page][1]
end
if released == 0 then redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2]) end
return released
