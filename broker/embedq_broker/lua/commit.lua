-- The one atomic step in which outputs become visible and inputs are acknowledged.
-- KEYS: 1 token, 2 bytes hash, 3 events stream, 4 held hash, then whatever streams and run hashes the plan names by index
-- ARGV: 1 plan (JSON), 2... payloads
-- plan = {
--   ttl_ms,                      how long the token is remembered: longer than any retry
--   group, consumer,             the lease holder
--   inputs = {{k, field, ids, deliveries, sizes}},   entries to acknowledge, per stream
--   adds = {{k, field, name, payload, fields, run, ttl_ms}},   entries to add: `fields`, then `name` with the payload that
--                                indexes ARGV, whose bytes count under `field`; only while run hash `run` exists
--   incrs = {{k, counter, by}},  run counters
-- }
-- Returns {'ok', id of each add ('' if its run is gone)...} | {'dup'} | {'lost', {stream key, id, stream key, id, ...}}
local plan = cjson.decode(ARGV[1])
-- Renewing the token is a write: WAIT and WAITAOF speak only of writes of their own connection, and the one that
-- committed may have been lost with its reply.
if redis.call('PEXPIRE', KEYS[1], plan.ttl_ms) == 1 then return {'dup'} end
local lost = {}
for _, input in ipairs(plan.inputs) do
  local key = KEYS[input.k]
  for i, id in ipairs(input.ids) do
    local p = redis.call('XPENDING', key, plan.group, id, id, 1)[1]
    if not p or p[2] ~= plan.consumer or p[4] ~= input.deliveries[i] then
      lost[#lost + 1] = key
      lost[#lost + 1] = id
    end
  end
end
if #lost > 0 then return {'lost', lost} end
local reply = {'ok'}
local changed = {}
for _, add in ipairs(plan.adds) do
  if add.run and redis.call('EXISTS', KEYS[add.run]) == 0 then
    reply[#reply + 1] = ''
  else
    local fields = add.fields
    if add.payload then
      fields[#fields + 1] = add.name or 'payload'
      fields[#fields + 1] = ARGV[add.payload]
      local size = #ARGV[add.payload]
      if add.run then
        add_held(KEYS[2], KEYS[4], add.field, size)
      else
        redis.call('HINCRBY', KEYS[2], add.field, size)
      end
    end
    reply[#reply + 1] = redis.call('XADD', KEYS[add.k], '*', unpack(fields))
    if add.ttl_ms then redis.call('PEXPIRE', KEYS[add.k], add.ttl_ms) end
    if add.run then changed[KEYS[add.run]] = true end
  end
end
local touched = {}
for _, incr in ipairs(plan.incrs) do
  local key = KEYS[incr.k]
  if touched[key] or redis.call('EXISTS', key) == 1 then
    redis.call('HINCRBY', key, incr.counter, incr.by)
    touched[key] = true
  end
end
local now = now_ms()
for key in pairs(touched) do
  redis.call('HSET', key, 'updated_ms', now)
  if settle(key) then changed[key] = true end
end
announce(KEYS[3], changed)
redis.call('SET', KEYS[1], 1, 'PX', plan.ttl_ms)
for _, input in ipairs(plan.inputs) do
  local key = KEYS[input.k]
  local freed = 0
  for i, id in ipairs(input.ids) do
    redis.call('XACK', key, plan.group, id)
    redis.call('XDEL', key, id)
    -- Whoever held the lease frees the bytes, even where the entry was deleted by hand meanwhile.
    freed = freed + input.sizes[i]
  end
  -- An empty stream holds nothing: this heals the count after entries were trimmed by hand.
  if redis.call('XLEN', key) == 0 then
    redis.call('HDEL', KEYS[2], input.field)
  else
    redis.call('HINCRBY', KEYS[2], input.field, -freed)
  end
end
return reply
