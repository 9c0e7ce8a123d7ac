-- Note that work on an entry begins, or that it came back. What began and never came back ended its process.
-- KEYS: 1 tries hash
-- ARGV: 1 the entry, 2 begins (1) or came back (0), 3 ttl in ms
-- Returns how many tries before this one never came back; 0 when one came back.
if ARGV[2] == '0' then
  redis.call('HDEL', KEYS[1], ARGV[1])
  return 0
end
local tries = redis.call('HINCRBY', KEYS[1], ARGV[1], 1)
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return tries - 1
