#!lua
-- The janitor: settle requests whose lease ran out, as they were last checkpointed.
--
-- KEYS  1 leases  2 usage stream
-- ARGV  1 clock offset in ms  2 prefix of the shard's keys  3 most requests to settle  4 life of a tombstone, ms
-- Replies
--   how many leases had run out (the most allowed: there may be more), then the ids settled
--
-- The keys of tenants and requests are made here from the prefix; they bear the shard's hash tag like those in KEYS.

-- Negate by subtracting from 0: -0 would become "-0", which is no integer to Redis.
local function text(number)
  return string.format('%.0f', number)
end

local clock = redis.call('TIME')
local now = tonumber(clock[1]) * 1000 + math.floor(tonumber(clock[2]) / 1000) + tonumber(ARGV[1])
local prefix = ARGV[2]
local expired = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', text(now), 'LIMIT', 0, tonumber(ARGV[3]))
local reply = { #expired }
for _, id in ipairs(expired) do
  local reservation = prefix .. 'request:' .. id
  local held = redis.call('HMGET', reservation, 'state', 'tenant', 'period', 'bound', 'bucket', 'charged', 'event')
  if held[2] then
    local key = prefix .. 'tenant:' .. held[2]
    redis.call('ZREM', key .. ':live', id)
    if held[1] == 'open' then
      local tenant = redis.call('HMGET', key, 'kind', 'start', 'end')
      if tenant[1] and held[3] == tenant[1] .. ':' .. tenant[2] .. ':' .. tenant[3] then
        redis.call('HINCRBY', key, 'spent', text(tonumber(held[6])))
        redis.call('HINCRBY', key, 'reserved', text(0 - tonumber(held[4])))
      end
      redis.call('HINCRBY', key, 'settlements', 1)
      redis.call('XADD', KEYS[2], '*', 'event', held[7], 'revision', '1')
      redis.call('HDEL', reservation, 'event', 'bound', 'admitted')
      redis.call('HSET', reservation, 'state', 'settled', 'by', 'janitor')
      redis.call('PEXPIRE', reservation, ARGV[4])
      reply[#reply + 1] = id
    end
  end
  redis.call('ZREM', KEYS[1], id)
end
return reply
