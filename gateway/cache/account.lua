#!lua
-- How each script of this room begins: the clock, and the bytes that a tenant's entries take together.
--
-- KEYS  1 entry  2 when entries were made, in us  3 when they expire, in ms  4 their bytes  5 the bytes of all
-- ARGV  1 clock offset in ms (0 but in tests)  2 prefix of the entries' keys  3 name of the entry
--
-- Entries go by themselves; what they took is given back by the next script that runs. Should Redis have evicted some
-- of these keys, the entries that the others know are forgotten: what is not counted could not be bounded.

local MOST = 1000 -- entries that one script lets go of

-- Negate by subtracting from 0: -0 would become "-0", which is no integer to Redis.
local function text(number)
  return string.format('%.0f', number)
end

local clock = redis.call('TIME')
local now_us = tonumber(clock[1]) * 1000000 + tonumber(clock[2]) + tonumber(ARGV[1]) * 1000
local now = math.floor(now_us / 1000)
local prefix, me = ARGV[2], ARGV[3]

local function forget(name)
  redis.call('DEL', prefix .. name)
  local bytes = redis.call('ZSCORE', KEYS[4], name)
  redis.call('ZREM', KEYS[2], name)
  redis.call('ZREM', KEYS[3], name)
  redis.call('ZREM', KEYS[4], name)
  if bytes and redis.call('EXISTS', KEYS[4]) == 0 then
    redis.call('DEL', KEYS[5])
  elseif bytes then
    redis.call('DECRBY', KEYS[5], text(tonumber(bytes)))
  end
  return bytes and 1 or 0
end

local function total()
  return tonumber(redis.call('GET', KEYS[5]) or '0')
end

local function forget_all_unless_it_adds_up()
  local made, expires, sizes =
    redis.call('ZCARD', KEYS[2]), redis.call('ZCARD', KEYS[3]), redis.call('ZCARD', KEYS[4])
  if made == expires and made == sizes and (made > 0) == (redis.call('EXISTS', KEYS[5]) == 1) then
    return
  end
  for index = 2, 4 do
    for _, name in ipairs(redis.call('ZRANGE', KEYS[index], 0, -1)) do
      redis.call('UNLINK', prefix .. name)
    end
  end
  redis.call('UNLINK', KEYS[2], KEYS[3], KEYS[4], KEYS[5])
end

local function forget_what_expired()
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', text(now), 'LIMIT', 0, MOST)) do
    forget(name)
  end
end

forget_all_unless_it_adds_up()
forget_what_expired()
