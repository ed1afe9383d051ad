-- Forget a batch of refusal counts, now that Postgres has it; another batch that took its place stays.
--
-- KEYS  1 batch
-- ARGV  1 id of the batch

if redis.call('HGET', KEYS[1], 'batch') == ARGV[1] then
  redis.call('DEL', KEYS[1])
end
return 0
