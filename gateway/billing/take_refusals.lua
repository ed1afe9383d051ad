-- Set a shard's refusal counts aside as a batch, or give the batch that was set aside before and never forgotten.
--
-- KEYS  1 counts  2 batch
-- ARGV  1 id for a new batch
-- Reply: the batch's fields and values, flat; its id is under `batch`. Empty: nothing to move.

if redis.call('EXISTS', KEYS[2]) == 0 then
  if redis.call('EXISTS', KEYS[1]) == 0 then
    return {}
  end
  redis.call('RENAME', KEYS[1], KEYS[2])
  redis.call('HSET', KEYS[2], 'batch', ARGV[1])
end
return redis.call('HGETALL', KEYS[2])
