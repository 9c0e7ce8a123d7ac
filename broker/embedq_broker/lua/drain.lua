-- Dead letters were written to a file: drop them, if the range still is the one that was planned.
-- KEYS: 1 dead letters stream, 2 run hash, 3 bytes hash, 4 held hash
-- ARGV: 1 the planned range, 2 field of `held`, 3... ids
-- Returns the number dropped.
if redis.call('HGET', KEYS[2], 'drain_range') ~= ARGV[1] then return 0 end
local dropped, freed = 0, 0
for i = 3, #ARGV do
  local entry = redis.call('XRANGE', KEYS[1], ARGV[i], ARGV[i])[1]
  if entry then
    freed = freed + #entry[2][2]
    dropped = dropped + redis.call('XDEL', KEYS[1], ARGV[i])
  end
end
-- An empty stream holds nothing.
if redis.call('XLEN', KEYS[1]) == 0 then
  drop_held(KEYS[3], KEYS[4], ARGV[2])
else
  add_held(KEYS[3], KEYS[4], ARGV[2], -freed)
end
redis.call('HDEL', KEYS[2], 'drain_range')
return dropped
