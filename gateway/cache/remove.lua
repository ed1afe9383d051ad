-- Forget entries.
--
-- ARGV  4... names of more
-- Replies
--   how many were there

local gone = 0
for index = 3, #ARGV do
  if ARGV[index] ~= '' then
    gone = gone + forget(ARGV[index])
  end
end
return gone
