-- Read pieces of the answer of one owner.
--
-- ARGV  4 number of pieces known  5 most to be read
-- Replies
--   RUNNING or DONE, number of pieces, those asked for | LOST (the owner is dead, or has dropped the entry)

local entry = redis.call('HMGET', KEYS[1], 'owner', 'ends', 'done')
if entry[1] ~= me or tonumber(entry[2]) <= now then
  return { 'LOST' }
end
local from = tonumber(ARGV[4])
return {
  entry[3] and 'DONE' or 'RUNNING',
  redis.call('LLEN', KEYS[2]),
  redis.call('LRANGE', KEYS[2], from, from + tonumber(ARGV[5]) - 1),
}
