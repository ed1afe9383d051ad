-- Look at what a shard holds of some requests, in one step.
--
-- KEYS  1 leases
-- ARGV  1 clock offset in ms  2 prefix of the shard's keys  3 ms after which a lease that ran out is strange
--       then ids of requests
-- Reply: list of id, tenant (or ''), what is wrong: '' if nothing is and the request is settled. Open requests that are
--   in order are left out, and so are those of which nothing is left.
--
-- The keys of tenants and requests are made here from the prefix; they bear the shard's hash tag like those in KEYS.

local now, prefix, reply = time(ARGV[1]), ARGV[2], {}
for at = 4, #ARGV do
  local id = ARGV[at]
  local key = prefix .. 'request:' .. id
  local held = redis.call('HMGET', key, 'state', 'tenant')
  local state, tenant = held[1], held[2]
  local lease = redis.call('ZSCORE', KEYS[1], id)
  local wrong
  if not state then
    wrong = lease and 'unreserved' or nil
  elseif state == 'open' then
    if not lease then
      wrong = 'unleased'
    elseif not redis.call('ZSCORE', prefix .. 'tenant:' .. (tenant or '') .. ':live', id) then
      wrong = 'slotless'
    elseif now - tonumber(lease) > tonumber(ARGV[3]) then
      wrong = 'expired'
    end
  elseif redis.call('PTTL', key) < 0 then
    wrong = 'endless'
  elseif state == 'withdrawn' and lease then
    wrong = 'withdrawn'
  elseif state == 'settled' then
    wrong = ''
  end
  if wrong then
    reply[#reply + 1] = { id, tenant or '', wrong }
  end
end
return reply
