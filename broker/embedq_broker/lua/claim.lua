-- Take over entries whose lease ran out. Raises their delivery count, and tells it.
-- KEYS: 1 stream
-- ARGV: 1 group, 2 consumer, 3 lease in ms, 4 cursor, 5 count
-- Returns {next cursor, {id, fields, deliveries}...}

-- XAUTOCLAIM looks at 10 pending entries per entry asked for; a consumer with room for one must not need many sweeps
-- to get past entries that others rightly hold.
local MOST_SEEN = 2000

local reply = {ARGV[4]}
local left, seen = tonumber(ARGV[5]), 0
repeat
  local r = redis.call('XAUTOCLAIM', KEYS[1], ARGV[1], ARGV[2], ARGV[3], reply[1], 'COUNT', left)
  reply[1] = r[1]
  seen = seen + 10 * left
  for _, entry in ipairs(r[2]) do
    local p = redis.call('XPENDING', KEYS[1], ARGV[1], entry[1], entry[1], 1)[1]
    reply[#reply + 1] = {entry[1], entry[2], p[4]}
    left = left - 1
  end
until left == 0 or seen >= MOST_SEEN or r[1] == '0-0'
return reply
