-- Create a consumer group, and its stream, unless they are there; from the beginning: nothing added before is skipped.
-- A script, since XGROUP CREATE itself is refused by a full server even where nothing is to be created.
-- KEYS: 1 stream
-- ARGV: 1 group
local made = redis.pcall('XGROUP', 'CREATE', KEYS[1], ARGV[1], '0', 'MKSTREAM')
if made.err and not string.find(made.err, 'BUSYGROUP', 1, true) then return made end
return 1
