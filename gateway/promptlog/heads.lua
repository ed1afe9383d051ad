-- Which data key sealed which entry: the first 16 bytes of the metadata.
--
-- ARGV  3 after which place, or ''  4 up to which one  5 most entries
-- Replies
--   place, id of the key, place, id of the key, ...

local found = {}
local start = ARGV[3] == '' and '-' or '(' .. ARGV[3]
for _, entry in ipairs(redis.call('XRANGE', KEYS[1], start, ARGV[4], 'COUNT', tonumber(ARGV[5]))) do
  found[#found + 1] = entry[1]
  found[#found + 1] = string.sub(field(entry, 'm'), 1, 16)
end
return found
