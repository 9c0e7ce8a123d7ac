-- Register a run, or find it.
-- KEYS: 1 run hash, 2 runs sorted set, 3 set of runs with a dataset to finish
-- ARGV: 1 run id, 2 specification, 3 sink kind, 4 (optional) how long to remember the run after its end, in ms
-- Returns {1} when created, {0, specification} when it was there.
local spec = redis.call('HGET', KEYS[1], 'spec')
if spec then return {0, spec} end
local now = now_ms()
redis.call('HSET', KEYS[1], 'spec', ARGV[2], 'sink', ARGV[3], 'status', 'validating', 'input_closed', 0,
  'input', 0, 'ready', 0, 'succeeded', 0, 'failed', 0, 'skipped', 0, 'tokens', 0,
  'committed_files', 0, 'published_files', 0, 'created_ms', now, 'updated_ms', now)
if ARGV[4] then redis.call('HSET', KEYS[1], 'keep_ms', ARGV[4]) end
redis.call('ZADD', KEYS[2], now, ARGV[1])
if ARGV[3] == 'parquet' then redis.call('SADD', KEYS[3], ARGV[1]) end
return {1}
