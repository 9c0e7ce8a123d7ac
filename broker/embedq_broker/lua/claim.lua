-- Take over entries whose lease ran out. Raises their delivery count, and tells it.
-- KEYS: 1 stream
-- ARGV: 1 group, 2 consumer, 3 lease in ms, 4 cursor, 5 count
-- Returns {next cursor, {id, fields, deliveries}...}
local r = redis.call('XAUTOCLAIM', KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4], 'COUNT', ARGV[5])
local reply = {r[1]}
for _, entry in ipairs(r[2]) do
  local p = redis.call('XPENDING', KEYS[1], ARGV[1], entry[1], entry[1], 1)[1]
  reply[#reply + 1] = {entry[1], entry[2], p[4]}
end
return reply
