-- Deliver again what this consumer owns but never received: the reply of its read was lost on the way.
-- KEYS: 1 stream
-- ARGV: 1 group, 2 consumer, 3 count, 4... ids it does hold
-- Returns {{id, fields, deliveries}...}
local held = {}
for i = 4, #ARGV do held[ARGV[i]] = true end
local reply = {}
for _, p in ipairs(redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 10000, ARGV[2])) do
  if not held[p[1]] and #reply < tonumber(ARGV[3]) then
    local entry = redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, p[1])[1]
    if entry then reply[#reply + 1] = {entry[1], entry[2], p[4] + 1} end
  end
end
return reply
