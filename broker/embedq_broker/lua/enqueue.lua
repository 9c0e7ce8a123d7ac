-- Send one job, with the outcomes of documents that never become jobs, and advance the producer's position.
-- The position is the idempotency token: it is compared and set, so a retried call adds nothing twice and a second
-- producer of the same run is fenced off.
-- KEYS: 1 run hash, 2 jobs stream, 3 bytes hash, 4 dead letters stream, 5 events stream, 6 held hash
-- ARGV: 1 expected position, 2 new position, 3 max backlog bytes, 4 field of `bytes`, 5 run id, 6 documents, 7 skipped,
--       8 close input (0/1), 9 schema version, 10 codec, 11 payload ('' for none), 12 documents whose outcome is counted
--       already, 13... dead letters
-- Returns {'ok'} | {'dup'} | {'fenced', position} | {'stopped', status or 'closed'} | {'full', backlog} | {'gone'}
local r = redis.call('HMGET', KEYS[1], 'status', 'position', 'input_closed')
if not r[1] then return {'gone'} end
local position = r[2] or ''
if position == ARGV[2] and (ARGV[8] == '0' or r[3] == '1') then return {'dup'} end
if position ~= ARGV[1] then return {'fenced', position} end
if r[1] ~= 'validating' and r[1] ~= 'in_progress' then return {'stopped', r[1]} end
if r[3] == '1' then return {'stopped', 'closed'} end
local size, dead_size = #ARGV[11], 0
for i = 13, #ARGV do dead_size = dead_size + #ARGV[i] end
if size + dead_size > 0 then
  local held = backlog(KEYS[3])
  if held > 0 and held + size + dead_size > tonumber(ARGV[3]) then return {'full', held} end
end
if size > 0 then
  redis.call('XADD', KEYS[2], '*', 'v', ARGV[9], 'codec', ARGV[10], 'run', ARGV[5], 'n', ARGV[6], 'payload', ARGV[11])
  redis.call('HINCRBY', KEYS[3], ARGV[4], size)
end
local dead = #ARGV - 12
for i = 13, #ARGV do redis.call('XADD', KEYS[4], '*', 'letter', ARGV[i]) end
if dead > 0 then add_held(KEYS[3], KEYS[6], 'dead:' .. ARGV[5], dead_size) end
local skipped, settled = tonumber(ARGV[7]), tonumber(ARGV[12])
redis.call('HINCRBY', KEYS[1], 'input', tonumber(ARGV[6]) + skipped + settled + dead)
redis.call('HINCRBY', KEYS[1], 'ready', skipped + settled + dead)
redis.call('HINCRBY', KEYS[1], 'failed', dead)
redis.call('HINCRBY', KEYS[1], 'skipped', skipped)
redis.call('HSET', KEYS[1], 'position', ARGV[2], 'status', 'in_progress', 'updated_ms', now_ms())
local changed = dead > 0
if ARGV[8] == '1' then
  redis.call('HSET', KEYS[1], 'input_closed', 1)
  changed = settle(KEYS[1]) or changed
end
if changed then announce(KEYS[5], {[KEYS[1]] = true}) end
return {'ok'}
