-- Attach feedback to an entry; what was attached before is replaced.
--
-- ARGV  3 request  4 sealed feedback
-- Replies
--   1, or 0 if there is no such entry

local hash = hash_of(ARGV[3])
local id = redis.call('HGET', hash, 's')
if not id then
  return 0
end
local more = #ARGV[4] - redis.call('HSTRLEN', hash, 'f')
redis.call('HSET', hash, 'f', ARGV[4])
redis.call('HINCRBY', hash, 'n', text(more))
local from = redis.call('HGET', KEYS[2], 'from')
if not from or not before(id, from) then
  count(more)
end
return 1
