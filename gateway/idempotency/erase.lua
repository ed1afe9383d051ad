-- Erase an entry, running or kept: whosever it is (owner ''), or that of one owner.
--
-- Replies
--   1 if there was one, else 0
--
-- One that runs is lost to its owner, who delivers the answer to its own client and keeps it no more.

local owner = redis.call('HGET', KEYS[1], 'owner')
if owner and me ~= '' and owner ~= me then
  return 0
end
if owner or me == '' then
  drop()
end
return owner and 1 or 0
