#!lua
-- Admit one request: every limit of the tenant is checked, then all are taken from, or none.
--
-- KEYS  1 epoch  2 tenant  3 window  4 live  5 reservation  6 leases  7 refusals
-- ARGV  1 clock offset in ms (0 but in tests)   2 lease in ms       3 request id      4 tenant id
--       5 key id                                6 generation        7 requests per minute, or ''
--       8 concurrent requests, or ''            9 bound, nano-USD  10 budget, nano-USD, or ''
--      11 kind of period  12 its start, ms     13 its end, ms      14 usage event up to admitted_at
--      15 and after it    16 life of an idle tenant's counters, ms      17 a generation to take back, or ''
-- Replies
--   ADMITTED, now, bucket, period, requests left (-1: no limit), ms until a request would pass
--   REFUSED, now, reason, ms until this request would pass (-1: unknown), limit, left, requests left, ms until one passes
--   STALE, generation known here | STALE_PERIOD, now | NEED_REBUILD, "epoch" or "budget" | OPENING, ms | DUPLICATE
--
-- Amounts stay below 2^53, where doubles are exact, and become text by %.0f only.

local WINDOW = 60 -- buckets of one second

local function text(number)
  return string.format('%.0f', number)
end

-- ISO 8601 in UTC. Days to date after Howard Hinnant, "chrono-compatible low-level date algorithms".
local function iso(ms)
  local days = math.floor(ms / 86400000)
  local second = math.floor(ms / 1000) - days * 86400
  local shifted = days + 719468
  local era = math.floor(shifted / 146097)
  local doe = shifted - era * 146097
  local yoe = math.floor((doe - math.floor(doe / 1460) + math.floor(doe / 36524) - math.floor(doe / 146096)) / 365)
  local doy = doe - (365 * yoe + math.floor(yoe / 4) - math.floor(yoe / 100))
  local mp = math.floor((5 * doy + 2) / 153)
  local day = doy - math.floor((153 * mp + 2) / 5) + 1
  local month = mp < 10 and mp + 3 or mp - 9
  local year = yoe + era * 400 + (month <= 2 and 1 or 0)
  return string.format('%04d-%02d-%02dT%02d:%02d:%02d.%03dZ', year, month, day, math.floor(second / 3600),
    math.floor(second / 60) % 60, second % 60, ms % 1000)
end

local clock = redis.call('TIME')
local now = tonumber(clock[1]) * 1000 + math.floor(tonumber(clock[2]) / 1000) + tonumber(ARGV[1])

local epoch = redis.call('GET', KEYS[1])
if not epoch then
  return { 'NEED_REBUILD', 'epoch' }
end
local opening = tonumber(epoch) - now
if opening > 0 and opening < 60000 then -- a longer wait was never meant: the clock was set back
  return { 'OPENING', opening }
end
if redis.call('EXISTS', KEYS[5]) == 1 then
  return { 'DUPLICATE' }
end

local tenant = redis.call('HMGET', KEYS[2], 'generation', 'kind', 'start', 'end', 'spent', 'reserved')
local generation = tonumber(ARGV[6])
if tenant[1] and tonumber(tenant[1]) > generation and tenant[1] ~= ARGV[17] then
  return { 'STALE', tonumber(tenant[1]) }
end

-- The budget. A period once begun lasts to its end, so that a change of zone begins with the next.
local bound = tonumber(ARGV[9])
local amount = tonumber(ARGV[10])
local period, period_end, spent, reserved = '', 0, 0, 0
if amount then
  if tenant[2] ~= ARGV[11] or now < tonumber(tenant[3]) or now >= tonumber(tenant[4]) then
    if now < tonumber(ARGV[12]) or now >= tonumber(ARGV[13]) then
      return { 'STALE_PERIOD', now }
    end
    return { 'NEED_REBUILD', 'budget' }
  end
  period = tenant[2] .. ':' .. tenant[3] .. ':' .. tenant[4]
  period_end = tonumber(tenant[4])
  spent = tonumber(tenant[5])
  reserved = tonumber(tenant[6])
end

-- The window: requests admitted in this second and the 60 before it, so that no 60 s ever hold more than the limit.
local bucket = math.floor(now / 1000)
local first = bucket - WINDOW
local window = redis.call('HMGET', KEYS[3], 'n', 'oldest')
local count = tonumber(window[1] or '0')
local oldest = math.min(tonumber(window[2] or text(bucket)), bucket) -- a clock may be set back
if oldest < first then
  if first - oldest > WINDOW then
    redis.call('DEL', KEYS[3])
    count = 0
  else
    for past = oldest, first - 1 do
      local field = text(past)
      local passed = redis.call('HGET', KEYS[3], field)
      if passed then
        count = count - tonumber(passed)
        redis.call('HDEL', KEYS[3], field)
      end
    end
    redis.call('HSET', KEYS[3], 'n', text(count), 'oldest', text(first))
  end
  oldest = first
end

-- Milliseconds until so many of the counted requests have left the window.
local function until_left(leaving)
  local fields = {}
  for past = oldest, bucket do
    fields[#fields + 1] = text(past)
  end
  local gone = 0
  for index, admitted in ipairs(redis.call('HMGET', KEYS[3], unpack(fields))) do
    gone = gone + tonumber(admitted or '0')
    if gone >= leaving then
      return (oldest + index + WINDOW) * 1000 - now
    end
  end
  return (WINDOW + 1) * 1000
end

local rate = tonumber(ARGV[7])
local slots = tonumber(ARGV[8])
local live = 0
if slots then
  live = redis.call('ZCOUNT', KEYS[4], '(' .. text(now), '+inf')
end

local reason, limit, left
local retry = 0
local function refuse(why, most, remaining, wait)
  if not reason then
    reason, limit, left = why, most, math.max(0, remaining)
  end
  if wait < 0 or retry < 0 then
    retry = -1
  else
    retry = math.max(retry, wait)
  end
end

if amount and spent + reserved + bound > amount then
  local wait
  if bound > amount then
    wait = -1
  elseif spent + bound <= amount then
    wait = 1000 -- what is reserved may come free any moment
  else
    wait = ARGV[11] == 'total' and -1 or period_end - now
  end
  refuse('budget', amount, amount - spent - reserved, wait)
end
if rate and count + 1 > rate then
  refuse('requests_per_minute', rate, 0, rate < 1 and -1 or until_left(count + 1 - rate))
end
if slots and live + 1 > slots then
  refuse('concurrent_requests', slots, 0, slots < 1 and -1 or 1000)
end

if reason then
  local quarter = math.floor(bucket / 900) * 900
  redis.call('HINCRBY', KEYS[7], ARGV[4] .. '|' .. ARGV[5] .. '|' .. reason .. '|' .. text(quarter), 1)
  local requests, reset = -1, 0
  if rate then
    requests = math.max(0, rate - count)
    reset = (requests > 0 or rate < 1) and 0 or until_left(count + 1 - rate)
  end
  return { 'REFUSED', now, reason, retry, limit, left, requests, reset }
end

local field = text(bucket)
redis.call('HINCRBY', KEYS[3], field, 1)
redis.call('HSET', KEYS[3], 'n', text(count + 1), 'oldest', text(oldest))
redis.call('PEXPIRE', KEYS[3], (WINDOW + 2) * 1000)

redis.call('HSET', KEYS[2], 'generation', text(generation))
if amount then
  redis.call('HINCRBY', KEYS[2], 'reserved', text(bound))
elseif tenant[2] then
  -- Nobody keeps these while there is no budget; a new one is built from the ledger.
  redis.call('HDEL', KEYS[2], 'kind', 'start', 'end', 'spent', 'reserved')
end
redis.call('PEXPIRE', KEYS[2], ARGV[16])

local expiry = text(now + tonumber(ARGV[2]))
redis.call('ZADD', KEYS[4], expiry, ARGV[3])
redis.call('ZADD', KEYS[6], expiry, ARGV[3])
redis.call('HSET', KEYS[5], 'state', 'open', 'tenant', ARGV[4], 'admitted', text(now), 'bound', text(bound),
  'period', period, 'bucket', field, 'charged', '0', 'event', ARGV[14] .. iso(now) .. ARGV[15])

local requests, reset = -1, 0
if rate then
  requests = rate - count - 1
  if requests < 1 then
    reset = until_left(1)
  end
end
return { 'ADMITTED', now, bucket, period, requests, reset }
