-- Remove entries by their places in the stream.
--
-- ARGV  from 3 on: places
-- Replies
--   how many there were

local removed = 0
for index = 3, #ARGV do
  local entry = redis.call('XRANGE', KEYS[1], ARGV[index], ARGV[index])[1]
  if entry then
    forget(entry)
    redis.call('XDEL', KEYS[1], ARGV[index])
    removed = removed + 1
  end
end
tidy()
return removed
