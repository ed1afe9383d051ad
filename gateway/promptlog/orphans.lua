-- Remove hashes beside which no entry is in the stream any more, because Redis evicted that.
--
-- ARGV  from 3 on: names of hashes
-- Replies
--   how many there were

local removed = 0
for index = 3, #ARGV do
  local id = redis.call('HGET', ARGV[index], 's')
  if not id or #redis.call('XRANGE', KEYS[1], id, id) == 0 then
    removed = removed + redis.call('UNLINK', ARGV[index])
  end
end
return removed
