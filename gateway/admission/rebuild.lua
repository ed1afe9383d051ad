#!lua
-- Begin a budget's period in Redis: what was spent comes from the ledger, what is reserved from the open requests.
--
-- KEYS  1 tenant  2 live
-- ARGV  1 clock offset in ms  2 prefix of the shard's keys  3 count of settlements when the ledger was about to be read
--       4 kind of period  5 its start, ms  6 its end, ms  7 spent, nano-USD  8 life of an idle tenant's counters, ms
-- Replies
--   REBUILT, reserved | KEPT (somebody was faster) | CHANGED (a settlement came between: read again)
--
-- The keys of requests are made here from the prefix; they bear the shard's hash tag like those in KEYS.

local function text(number)
  return string.format('%.0f', number)
end

local clock = redis.call('TIME')
local now = tonumber(clock[1]) * 1000 + math.floor(tonumber(clock[2]) / 1000) + tonumber(ARGV[1])
local tenant = redis.call('HMGET', KEYS[1], 'kind', 'start', 'end', 'settlements')
if tenant[1] == ARGV[4] and tonumber(tenant[2]) <= now and now < tonumber(tenant[3]) then
  return { 'KEPT' }
end
if (tenant[4] or '0') ~= ARGV[3] then
  return { 'CHANGED' }
end
local period = ARGV[4] .. ':' .. ARGV[5] .. ':' .. ARGV[6]
local reserved = 0
for _, id in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
  local reservation = ARGV[2] .. 'request:' .. id
  local held = redis.call('HMGET', reservation, 'state', 'admitted', 'bound')
  local admitted = tonumber(held[2] or '-1')
  if held[1] == 'open' and admitted >= tonumber(ARGV[5]) and admitted < tonumber(ARGV[6]) then
    reserved = reserved + tonumber(held[3])
    redis.call('HSET', reservation, 'period', period)
  end
end
redis.call('HSET', KEYS[1], 'kind', ARGV[4], 'start', ARGV[5], 'end', ARGV[6], 'spent', ARGV[7],
  'reserved', text(reserved))
redis.call('PEXPIRE', KEYS[1], ARGV[8])
return { 'REBUILT', reserved }
