-- Count anew who holds the slots of a limit on concurrent requests, since the limit is new.
--
-- KEYS  1 tenant  2 live
-- ARGV  1 prefix of the shard's keys  2 counter, without the end user if it is of each apart  3 limit's id
--
-- The keys of requests are made here from the prefix; they bear the shard's hash tag like those in KEYS.

local tenant, counter = KEYS[1], ARGV[2]
local _, _, subject, target = parts(counter)
local live = redis.call('ZRANGE', KEYS[2], 0, -1, 'WITHSCORES')
for at = 1, #live, 2 do
  local reservation = ARGV[1] .. 'request:' .. live[at]
  local held = redis.call('HMGET', reservation, 'who', 'user', 'counters')
  if held[1] then
    local user = held[2] ~= '' and held[2]
    if subject == 'each' and user or subject ~= 'each' and counts(subject, target, cmsgpack.unpack(held[1]), user) then
      take_slot(tenant, named(counter, user), live[at], live[at + 1])
      local counters, there = listed(held[3]), false
      for _, other in ipairs(counters) do
        there = there or other == counter
      end
      if not there then
        counters[#counters + 1] = counter
        redis.call('HSET', reservation, 'counters', cmsgpack.pack(counters))
      end
    end
  end
end
redis.call('HSET', tenant, counter, ARGV[3])
return { 'RECOUNTED' }
