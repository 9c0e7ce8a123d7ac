-- Take over entries whose lease ran out. Raises their delivery count, and tells it.
-- Not XAUTOCLAIM: that would also take what the caller holds, and so end leases it is working under. What the caller
-- owns and does not hold was stranded by a lost reply, and no one else may be there to take it.
-- KEYS: 1 stream
-- ARGV: 1 group, 2 consumer, 3 lease in ms, 4 start of the range ('-', or '(' and the last id seen), 5 count,
--       6... ids the caller holds
-- Returns {next start, {id, fields, deliveries}...}
local held = {}
for i = 6, #ARGV do held[ARGV[i]] = true end
local page = redis.call('XPENDING', KEYS[1], ARGV[1], 'IDLE', ARGV[3], ARGV[4], '+', ARGV[5])
local reply = {#page < tonumber(ARGV[5]) and '-' or '(' .. page[#page][1]}
for _, p in ipairs(page) do
  if p[2] ~= ARGV[2] or not held[p[1]] then
    -- Nothing comes back for an entry that was deleted by hand; its lease then ends with this call.
    local entry = redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], ARGV[3], p[1])[1]
    if entry then reply[#reply + 1] = {entry[1], entry[2], p[4] + 1} end
  end
end
return reply
