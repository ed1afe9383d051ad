#!lua
-- Give a shard its epoch: the time from which it admits. Until then every gateway can bring back what Redis lost.
--
-- KEYS  1 epoch
-- ARGV  1 clock offset in ms  2 ms to wait
-- Replies
--   the epoch in force, as text, and now

local clock = redis.call('TIME')
local now = tonumber(clock[1]) * 1000 + math.floor(tonumber(clock[2]) / 1000) + tonumber(ARGV[1])
redis.call('SET', KEYS[1], string.format('%.0f', now + tonumber(ARGV[2])), 'NX')
return { redis.call('GET', KEYS[1]), now }
