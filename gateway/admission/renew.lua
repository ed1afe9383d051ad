-- Renew the leases of one gateway's running requests in one shard, and keep their usage so far.
--
-- KEYS  1 epoch  2 leases
-- ARGV  1 clock offset in ms  2 lease in ms  3 prefix of the shard's keys
--       then for each request: id, tenant id, usage event (JSON; '' if nothing changed), charged so far in nano-USD,
--       tokens so far
-- Replies
--   epoch ('' if there is none), then the ids that Redis knows nothing of, and with a + before them those that the
--   janitor has settled
--
-- The keys of tenants and requests are made here from the prefix; they bear the shard's hash tag like those in KEYS.

local expiry = text(time(ARGV[1]) + tonumber(ARGV[2]))
local prefix = ARGV[3]
local reply = { redis.call('GET', KEYS[1]) or '' }
for at = 4, #ARGV, 5 do
  local id, event = ARGV[at], ARGV[at + 2]
  local reservation = prefix .. 'request:' .. id
  local held = redis.call('HMGET', reservation, 'state', 'by', 'counters', 'user')
  if not held[1] or held[1] == 'withdrawn' then
    reply[#reply + 1] = id
  elseif held[1] == 'open' or held[2] == 'janitor' then
    -- After the janitor it still runs, and so it holds its slots; its own settlement will be revision 2.
    local tenant = prefix .. 'tenant:' .. ARGV[at + 1]
    redis.call('ZADD', KEYS[2], expiry, id)
    redis.call('ZADD', tenant .. ':live', expiry, id)
    if held[3] and held[3]:find('c::', 1, true) then
      for _, counter in ipairs(listed(held[3])) do
        if counter:sub(1, 2) == 'c:' then
          take_slot(tenant, named(counter, held[4]), id, expiry)
        end
      end
    end
    if held[1] ~= 'open' then
      reply[#reply + 1] = '+' .. id
    elseif event ~= '' then
      redis.call('HSET', reservation, 'event', event, 'charged', ARGV[at + 3], 'used', ARGV[at + 4])
    end
  end
end
return reply
