-- Publish a heartbeat. A script, since a full server refuses HSET: workers that could empty it would look dead.
-- KEYS: 1 workers hash
-- ARGV: 1 consumer, 2 heartbeat
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return 1
