-- Keep an answer until a moment that no hit moves.
--
-- KEYS   6 the mark of the tenant's last purge
-- ARGV   4 that mark when the question came, or nothing  5 life, ms  6 bytes of the entry, all told
--        7 most bytes of the tenant  8... fields and values
-- Replies
--   KEPT | TOO_LARGE | FULL (what is too much goes first) | PURGED (meanwhile: the answer may be what was to be forgotten)
--   and how many entries went to make room, the oldest first

if (redis.call('GET', KEYS[6]) or '') ~= ARGV[4] then
  return { 'PURGED', 0 }
end
local life, bytes, most = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
forget(me)
if bytes > most then
  return { 'TOO_LARGE', 0 }
end
local taken, evicted = total(), 0
while taken + bytes > most do
  local oldest = redis.call('ZRANGE', KEYS[2], 0, 0)[1]
  if not oldest or evicted == MOST then
    return { 'FULL', evicted }
  end
  forget(oldest)
  evicted = evicted + 1
  taken = total()
end
redis.call('HSET', KEYS[1], unpack(ARGV, 8))
redis.call('PEXPIREAT', KEYS[1], text(now + life))
redis.call('ZADD', KEYS[2], text(now_us), me)
redis.call('ZADD', KEYS[3], text(now + life), me)
redis.call('ZADD', KEYS[4], text(bytes), me)
redis.call('INCRBY', KEYS[5], text(bytes))
for index = 2, 5 do
  if redis.call('PTTL', KEYS[index]) < life then
    redis.call('PEXPIREAT', KEYS[index], text(now + life))
  end
end
return { 'KEPT', evicted }
