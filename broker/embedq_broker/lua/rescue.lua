-- Lease entries that were delivered but are nobody's: their consumer was deleted by hand, and its pending list with it.
-- Acknowledged entries are deleted in the same step, so what lies behind the group's mark and is not pending is such.
-- KEYS: 1 stream
-- ARGV: 1 group, 2 consumer, 3 count
-- Returns {{id, fields, deliveries}...}
local last
for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local name, mark
  for i = 1, #group, 2 do
    if group[i] == 'name' then name = group[i + 1] end
    if group[i] == 'last-delivered-id' then mark = group[i + 1] end
  end
  if name == ARGV[1] then last = mark end
end
local reply = {}
local from = '-'
while last and #reply < tonumber(ARGV[3]) do
  local page = redis.call('XRANGE', KEYS[1], from, last, 'COUNT', 32)
  for _, entry in ipairs(page) do
    if #reply < tonumber(ARGV[3]) and #redis.call('XPENDING', KEYS[1], ARGV[1], entry[1], entry[1], 1) == 0 then
      redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, entry[1], 'FORCE')
      local p = redis.call('XPENDING', KEYS[1], ARGV[1], entry[1], entry[1], 1)[1]
      reply[#reply + 1] = {entry[1], entry[2], p[4]}
    end
  end
  if #page < 32 then break end
  from = '(' .. page[#page][1]
end
return reply
