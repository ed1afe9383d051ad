#!lua
-- How each script of this room begins: the clock, and the bytes that a tenant's entries take together.
--
-- KEYS  1 entry  2 when entries were made, in us  3 when they expire, in ms  4 their bytes  5 the bytes of all
-- ARGV  1 clock offset in ms (0 but in tests)  2 prefix of the entries' keys  3 name of the entry
--
-- Entries go by themselves; what they took is given back by the next script that runs. Should Redis have evicted some
-- of these keys, the sum is made anew of what is left.

local MOST = 1000 -- entries that one script lets go of
local MOST_LIFE = 30 * 24 * 3600 * 1000 -- of an entry, ms

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
  if bytes then
    redis.call('DECRBY', KEYS[5], text(tonumber(bytes)))
  end
  return bytes and 1 or 0
end

local function total()
  local sum = redis.call('GET', KEYS[5])
  if not sum or tonumber(sum) < 0 then
    sum = 0
    local sizes = redis.call('ZRANGE', KEYS[4], 0, -1, 'WITHSCORES')
    for index = 2, #sizes, 2 do
      sum = sum + tonumber(sizes[index])
    end
    if sum > 0 then
      redis.call('SET', KEYS[5], text(sum), 'PX', MOST_LIFE)
    end
  end
  return tonumber(sum)
end

local function forget_what_expired()
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', text(now), 'LIMIT', 0, MOST)) do
    forget(name)
  end
end

total()
forget_what_expired()
