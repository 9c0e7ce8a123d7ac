-- Shared by the scripts that move a run's counters. Prepended to each of them.

-- How long a run is remembered after its end, where its `keep_ms` does not say otherwise.
local KEEP_RUN_MS = 7 * 86400 * 1000
-- Events kept. They only wake readers up, who look at the runs themselves: one that missed some looks a moment later.
local KEEP_EVENTS = 4096

-- Milliseconds since the epoch by the server's clock: workers' clocks may jump, this one orders the run's history.
local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

-- Bytes held in all streams of the queue.
local function backlog(bytes_key)
  local sum = 0
  for _, held in ipairs(redis.call('HVALS', bytes_key)) do sum = sum + tonumber(held) end
  return sum
end

-- Move the bytes of one run's results or dead letters, named by the suffix of their stream, and their sum over all runs.
local function add_held(bytes_key, held_key, suffix, by)
  redis.call('HINCRBY', held_key, suffix, by)
  redis.call('HINCRBY', bytes_key, suffix:match('^[^:]+'), by)
end

-- The stream of this suffix is gone, or empty: it holds nothing.
local function drop_held(bytes_key, held_key, suffix)
  local held = redis.call('HGET', held_key, suffix)
  if not held then return end
  redis.call('HDEL', held_key, suffix)
  local kind = suffix:match('^[^:]+')
  if redis.call('HINCRBY', bytes_key, kind, -held) <= 0 then redis.call('HDEL', bytes_key, kind) end
end

-- Let a run that is over be forgotten in time.
local function retire(run_key)
  redis.call('PEXPIRE', run_key, tonumber(redis.call('HGET', run_key, 'keep_ms')) or KEEP_RUN_MS)
end

-- Wake the clients that wait for one of `run_keys` (a set).
local function announce(events_key, run_keys)
  local names = {}
  for key in pairs(run_keys) do names[#names + 1] = key:match('}:run:(.*)$') end
  if #names > 0 then redis.call('XADD', events_key, 'MAXLEN', '~', KEEP_EVENTS, '*', 'runs', table.concat(names, ',')) end
end

-- A run whose input is closed and whose every document has its outcome moves on:
-- to `completed` where results already are where readers look, to `finalizing` where files still get their names.
-- Returns whether it did.
local function settle(run_key)
  local r = redis.call('HMGET', run_key, 'input_closed', 'status', 'sink', 'input', 'succeeded', 'failed', 'skipped')
  if r[1] ~= '1' then return false end
  if tonumber(r[4]) ~= tonumber(r[5]) + tonumber(r[6]) + tonumber(r[7]) then return false end
  local next_status
  if r[2] == 'cancelling' then
    next_status = r[3] == 'stream' and 'cancelled' or nil
  elseif r[2] == 'validating' or r[2] == 'in_progress' then
    next_status = r[3] == 'stream' and 'completed' or 'finalizing'
  end
  if not next_status then return false end
  redis.call('HSET', run_key, 'status', next_status)
  if next_status ~= 'finalizing' then retire(run_key) end
  return true
end
