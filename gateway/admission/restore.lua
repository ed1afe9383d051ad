#!lua
-- Put back a running request that Redis lost, as its gateway remembers it. Nothing is checked: it was admitted before.
--
-- KEYS  1 tenant  2 live  3 reservation  4 leases
-- ARGV  1 clock offset in ms  2 lease in ms  3 request id  4 tenant id  5 admitted at, ms  6 bound, nano-USD
--       7 period  8 charged so far, nano-USD  9 usage event (JSON)
-- Replies
--   RESTORED | DUPLICATE

if redis.call('EXISTS', KEYS[3]) == 1 then
  return { 'DUPLICATE' }
end
local clock = redis.call('TIME')
local now = tonumber(clock[1]) * 1000 + math.floor(tonumber(clock[2]) / 1000) + tonumber(ARGV[1])
local tenant = redis.call('HMGET', KEYS[1], 'kind', 'start', 'end')
if tenant[1] and ARGV[7] == tenant[1] .. ':' .. tenant[2] .. ':' .. tenant[3] then
  redis.call('HINCRBY', KEYS[1], 'reserved', ARGV[6])
end
local expiry = string.format('%.0f', now + tonumber(ARGV[2]))
redis.call('ZADD', KEYS[2], expiry, ARGV[3])
redis.call('ZADD', KEYS[4], expiry, ARGV[3])
redis.call('HSET', KEYS[3], 'state', 'open', 'tenant', ARGV[4], 'admitted', ARGV[5], 'bound', ARGV[6],
  'period', ARGV[7], 'charged', ARGV[8], 'event', ARGV[9])
return { 'RESTORED' }
