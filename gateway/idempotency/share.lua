-- The owner adds pieces of its answer, perhaps none, and renews its lease; or says that the answer is complete.
--
-- ARGV   4 lease, ms  5 life of an entry whose owner fell silent, ms  6 number of pieces before these
--        7 complete (0 or 1)  8 life of a kept answer, ms  9 of one that is not kept, for those who read it now, ms
--       10 most bytes of an answer  11 most bytes that a tenant's entries may take  12 and for one more to be kept
--       13 most entries for one more to be kept  14... the pieces
-- Replies
--   SHARED | KEPT | NOT_KEPT (complete, but the tenant has too much already) | LOST (no longer the owner)
--   TOO_LARGE | FULL: the entry was dropped
--
-- Sent again after an answer that was lost, it changes nothing.

local entry = redis.call('HMGET', KEYS[1], 'owner', 'bytes', 'done')
if entry[1] ~= me then
  return { 'LOST' }
end
if entry[3] then
  return { entry[3] }
end
uncount_what_is_gone()
local known = redis.call('LLEN', KEYS[2])
local first = 14 + known - tonumber(ARGV[6])
if first < 14 then -- pieces that were there are missing
  drop()
  return { 'LOST' }
end
local added = 0
for index = first, #ARGV do
  added = added + #ARGV[index]
end
local bytes = tonumber(entry[2]) + added
local total = tonumber(redis.call('HGET', KEYS[4], 'total') or '0') + added
if bytes > tonumber(ARGV[10]) then
  drop()
  return { 'TOO_LARGE' }
end
if total > tonumber(ARGV[11]) then
  drop()
  return { 'FULL' }
end
for index = first, #ARGV do
  redis.call('RPUSH', KEYS[2], ARGV[index])
end
redis.call('HSET', KEYS[1], 'bytes', text(bytes))
if ARGV[7] == '0' then
  redis.call('HSET', KEYS[1], 'ends', text(now + tonumber(ARGV[4])))
  count(ENTRY_BYTES + bytes, tonumber(ARGV[5]))
  return { 'SHARED' }
end
local kept = total <= tonumber(ARGV[12]) and redis.call('ZCARD', KEYS[3]) <= tonumber(ARGV[13])
local life, verdict = tonumber(ARGV[9]), 'NOT_KEPT'
if kept then
  life, verdict = tonumber(ARGV[8]), 'KEPT'
end
redis.call('HSET', KEYS[1], 'done', verdict, 'ends', text(now + life))
count(ENTRY_BYTES + bytes, life)
return { verdict }
