-- Become the owner of an entry, or learn whom to follow.
--
-- ARGV  4 hash of the body  5 lease, ms  6 life of an entry whose owner fell silent, ms
-- Replies
--   OWNER | FOLLOW, owner | REUSED (the key belongs to another body)
--
-- An entry is free when nobody has it, when the owner's lease has run out, or when the kept answer is too old: the
-- first who comes has it then, whatever the body.

uncount_what_is_gone()
local entry = redis.call('HMGET', KEYS[1], 'owner', 'body', 'ends')
if entry[1] and tonumber(entry[3]) > now then
  if entry[2] ~= ARGV[4] then
    return { 'REUSED' }
  end
  if entry[1] == me then
    return { 'OWNER' }
  end
  return { 'FOLLOW', entry[1] }
end
drop()
redis.call('HSET', KEYS[1], 'owner', me, 'body', ARGV[4], 'ends', text(now + tonumber(ARGV[5])), 'bytes', '0')
count(ENTRY_BYTES, tonumber(ARGV[6]))
return { 'OWNER' }
