#!lua
-- Settle one request: release its reservation and slot, charge what it cost, append its usage event. Once.
--
-- KEYS  1 tenant  2 window  3 live  4 reservation  5 leases  6 usage stream
-- ARGV  1 request id  2 period it was reserved in  3 charged, nano-USD  4 usage event (JSON; '' to withdraw)
--       5 give the request back to the window (0 or 1)  6 life of the tombstone, ms
-- Replies
--   SETTLED, revision | WITHDRAWN | DUPLICATE
--
-- What is left of the reservation is a tombstone: a second settlement changes nothing, except the first one after the
-- janitor's, which replaces it (revision 2) and brings the difference. A withdrawal, after an admission whose answer
-- was never seen, leaves no event, and its tombstone keeps that admission out if it arrives later.
--
-- Without a reservation Redis was emptied since the admission. The running period may then have been built from a
-- ledger that has this event already, so it ends, and the next admission builds it anew.

-- Negate by subtracting from 0: -0 would become "-0", which is no integer to Redis.
local function text(number)
  return string.format('%.0f', number)
end

local id, event = ARGV[1], ARGV[4]
local charged = tonumber(ARGV[3])
local held = redis.call('HMGET', KEYS[4], 'state', 'period', 'bound', 'bucket', 'charged', 'by')
local state = held[1]
if state and state ~= 'open' and not (state == 'settled' and held[6] == 'janitor' and event ~= '') then
  return { 'DUPLICATE' }
end

local period = state and held[2] or ARGV[2]
local tenant = redis.call('HMGET', KEYS[1], 'kind', 'start', 'end')
if tenant[1] and period == tenant[1] .. ':' .. tenant[2] .. ':' .. tenant[3] then
  if state == 'open' then
    redis.call('HINCRBY', KEYS[1], 'spent', text(charged))
    redis.call('HINCRBY', KEYS[1], 'reserved', text(0 - tonumber(held[3])))
  elseif state == 'settled' then
    redis.call('HINCRBY', KEYS[1], 'spent', text(charged - tonumber(held[5])))
  elseif event ~= '' then
    redis.call('HDEL', KEYS[1], 'kind', 'start', 'end', 'spent', 'reserved')
  end
end

local bucket = held[4]
if bucket and ARGV[5] == '1' and tonumber(redis.call('HGET', KEYS[2], bucket) or '0') > 0 then
  redis.call('HINCRBY', KEYS[2], bucket, -1)
  redis.call('HINCRBY', KEYS[2], 'n', -1)
end

redis.call('ZREM', KEYS[3], id)
redis.call('ZREM', KEYS[5], id)
redis.call('DEL', KEYS[4])
if event == '' then
  redis.call('HSET', KEYS[4], 'state', 'withdrawn')
  redis.call('PEXPIRE', KEYS[4], ARGV[6])
  return { 'WITHDRAWN' }
end
local revision = state == 'settled' and 2 or 1
redis.call('HINCRBY', KEYS[1], 'settlements', 1)
redis.call('XADD', KEYS[6], '*', 'event', event, 'revision', text(revision))
redis.call('HSET', KEYS[4], 'state', 'settled', 'by', 'gateway')
redis.call('PEXPIRE', KEYS[4], ARGV[6])
return { 'SETTLED', revision }
