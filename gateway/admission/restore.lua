-- Put back a running request that Redis lost, as its gateway remembers it. Nothing is checked: it was admitted before.
--
-- KEYS  1 tenant  2 live  3 reservation  4 leases
-- ARGV  1 clock offset in ms  2 lease in ms  3 request id  4 tenant id  5 admitted at, ms  6 bound, nano-USD
--       7 bound, tokens  8 charged so far, nano-USD  9 tokens so far  10 usage event (JSON)
--      11 counters  12 end user, or ''  13 who: project, key, route; 11 to 13 as its admission had them
-- Replies
--   RESTORED | DUPLICATE
--
-- Counters that are missing stay so: they are built with this request in them. Others that count it, since they were
-- built after its admission, are found in the tenant's index.

local held = redis.call('HGET', KEYS[3], 'state')
if held and held ~= 'withdrawn' then
  return { 'DUPLICATE' }
end
local tenant, id, user, now = KEYS[1], ARGV[3], ARGV[12], time(ARGV[1])
local admitted = tonumber(ARGV[5])
local expiry = text(now + tonumber(ARGV[2]))
local counters, seen = listed(ARGV[11]), {}
for _, counter in ipairs(counters) do
  seen[named(counter, user)] = true
end
local who = cmsgpack.unpack(ARGV[13])
for _, counter in ipairs(redis.call('ZRANGE', tenant .. ':counters', 0, -1)) do
  local kind, _, subject, target = parts(counter)
  if not seen[counter] and kind ~= 'c' and counts(subject, target, who, user) then
    counters[#counters + 1] = counter
  end
end
for _, counter in ipairs(counters) do
  counter = named(counter, user)
  local key = tenant .. ':' .. counter
  local kind, window = parts(counter)
  if kind == 'b' then
    if holds(redis.call('HMGET', key, 'start', 'end'), admitted) then
      redis.call('HINCRBY', key, 'reserved', ARGV[6])
    end
  elseif kind == 'c' then
    take_slot(tenant, counter, id, expiry)
  else
    put(tenant, counter, WIDTH[window], admitted, kind == 'r' and 1 or tonumber(ARGV[7]), now)
  end
end
redis.call('ZADD', KEYS[2], expiry, id)
redis.call('ZADD', KEYS[4], expiry, id)
redis.call('DEL', KEYS[3])
redis.call('HSET', KEYS[3], 'state', 'open', 'tenant', ARGV[4], 'admitted', ARGV[5], 'bound', ARGV[6],
  'tokens', ARGV[7], 'counters', cmsgpack.pack(counters), 'who', ARGV[13], 'user', user, 'charged', ARGV[8],
  'used', ARGV[9], 'event', ARGV[10], 'restored', '1')
return { 'RESTORED' }
