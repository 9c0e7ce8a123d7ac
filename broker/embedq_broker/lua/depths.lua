-- How much waits in streams, without their payloads.
-- KEYS: streams
-- ARGV: the consumer group of each
-- Returns {now in ms, entries, entries under lease, ms since the epoch of the oldest entry (-1: none), entries, ...}
local reply = {now_ms()}
for i, key in ipairs(KEYS) do
  local held = redis.pcall('XPENDING', key, ARGV[i])
  local oldest = redis.call('XRANGE', key, '-', '+', 'COUNT', 1)[1]
  reply[#reply + 1] = redis.call('XLEN', key)
  -- A stream may have no group yet.
  reply[#reply + 1] = held.err and 0 or held[1]
  reply[#reply + 1] = oldest and tonumber(oldest[1]:match('^%d+')) or -1
end
return reply
