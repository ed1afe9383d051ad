-- The owner gives the entry up, unless it is complete.
--
-- Replies
--   1 if it was there, else 0

local entry = redis.call('HMGET', KEYS[1], 'owner', 'done')
if entry[1] ~= me or entry[2] then
  return 0
end
drop()
return 1
