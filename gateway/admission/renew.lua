#!lua
-- Renew the leases of one gateway's running requests in one shard, and keep their usage so far.
--
-- KEYS  1 epoch  2 leases
-- ARGV  1 clock offset in ms  2 lease in ms  3 prefix of the shard's keys
--       then for each request: id, tenant id, usage event (JSON; '' if nothing changed), charged so far in nano-USD
-- Replies
--   epoch ('' if there is none), then the ids that Redis knows nothing of
--
-- The keys of tenants and requests are made here from the prefix; they bear the shard's hash tag like those in KEYS.

local clock = redis.call('TIME')
local now = tonumber(clock[1]) * 1000 + math.floor(tonumber(clock[2]) / 1000) + tonumber(ARGV[1])
local expiry = string.format('%.0f', now + tonumber(ARGV[2]))
local prefix = ARGV[3]
local reply = { redis.call('GET', KEYS[1]) or '' }
for at = 4, #ARGV, 4 do
  local id, event = ARGV[at], ARGV[at + 2]
  local reservation = prefix .. 'request:' .. id
  local state = redis.call('HMGET', reservation, 'state', 'by')
  if not state[1] then
    reply[#reply + 1] = id
  elseif state[1] == 'open' or state[2] == 'janitor' then
    -- After the janitor it still runs, and so it holds a slot; its own settlement will be revision 2.
    redis.call('ZADD', KEYS[2], expiry, id)
    redis.call('ZADD', prefix .. 'tenant:' .. ARGV[at + 1] .. ':live', expiry, id)
    if state[1] == 'open' and event ~= '' then
      redis.call('HSET', reservation, 'event', event, 'charged', ARGV[at + 3])
    end
  end
end
return reply
