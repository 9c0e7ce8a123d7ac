-- Results were stored elsewhere: drop them, and take them out of the backlog.
-- KEYS: 1 results stream, 2 bytes hash, 3 held hash
-- ARGV: 1 field of `held`, then id and payload size of each entry
-- Returns the number dropped.
local dropped, freed = 0, 0
for i = 2, #ARGV, 2 do
  if redis.call('XDEL', KEYS[1], ARGV[i]) == 1 then
    dropped = dropped + 1
    freed = freed + tonumber(ARGV[i + 1])
  end
end
-- An empty stream holds nothing.
if redis.call('XLEN', KEYS[1]) == 0 then
  drop_held(KEYS[2], KEYS[3], ARGV[1])
elseif freed > 0 then
  add_held(KEYS[2], KEYS[3], ARGV[1], -freed)
end
return dropped
