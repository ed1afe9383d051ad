-- The janitor: settle requests whose lease ran out, as they were last checkpointed.
--
-- KEYS  1 leases  2 usage stream  3 alerts
-- ARGV  1 clock offset in ms  2 prefix of the shard's keys  3 most requests to settle  4 life of a tombstone, ms
-- Replies
--   how many leases had run out (the most allowed: there may be more), then the ids settled
--
-- The keys of tenants and requests are made here from the prefix; they bear the shard's hash tag like those in KEYS.

local now = time(ARGV[1])
local prefix = ARGV[2]
local expired = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', text(now), 'LIMIT', 0, tonumber(ARGV[3]))
local reply = { #expired }
for _, id in ipairs(expired) do
  local reservation = prefix .. 'request:' .. id
  local held = redis.call('HMGET', reservation, 'state', 'tenant', 'admitted', 'bound', 'tokens', 'charged', 'used',
    'counters', 'user', 'event')
  if held[2] then
    local tenant = prefix .. 'tenant:' .. held[2]
    redis.call('ZREM', tenant .. ':live', id)
    local request = { admitted = tonumber(held[3]), counters = held[8], user = held[9] }
    if held[1] == 'open' then
      local by = { spent = tonumber(held[6]), reserved = 0 - tonumber(held[4]),
        tokens = tonumber(held[7] or '0') - tonumber(held[5] or '0'), requests = 0 }
      change(tenant, held[2], id, request, by, KEYS[3], now)
      redis.call('HINCRBY', tenant, 'settlements', 1)
      redis.call('XADD', KEYS[2], '*', 'event', held[10], 'revision', '1')
      redis.call('HDEL', reservation, 'event', 'bound', 'tokens')
      redis.call('HSET', reservation, 'state', 'settled', 'by', 'janitor')
      redis.call('PEXPIRE', reservation, ARGV[4])
      reply[#reply + 1] = id
    else
      for _, counter in ipairs(listed(request.counters)) do
        if counter:sub(1, 2) == 'c:' then
          free_slot(tenant, named(counter, request.user), id)
        end
      end
    end
  end
  redis.call('ZREM', KEYS[1], id)
end
return reply
