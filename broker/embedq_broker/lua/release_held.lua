-- Take streams that do not exist out of the backlog.
-- KEYS: 1 bytes hash, 2 held hash, 3... streams
-- ARGV: 1... field of `held` of each stream
-- Returns how many do not exist.
local gone = 0
for i, suffix in ipairs(ARGV) do
  if redis.call('EXISTS', KEYS[i + 2]) == 0 then
    drop_held(KEYS[1], KEYS[2], suffix)
    gone = gone + 1
  end
end
return gone
