-- What the scripts of a shard share; put before each of them (see scripts.py).
--
-- A counter belongs to a tenant and has a name, `<kind>:<window>:<subject>:<target>`; its key is the tenant's key, a
-- colon and that name. Kinds: b a budget, r requests, t tokens, c concurrent requests. Subject `each` is each end user
-- apart: in lists of counters its target is left out, and the request's own end user takes that place.
--
-- Amounts stay below 2^53, where doubles are exact, and become text by %.0f only. Negate by subtracting from 0: -0
-- would become "-0", which is no integer to Redis.

local BUCKETS = 60 -- of a window, and one more: the running one
local WIDTH = { minute = 1000, hour = 60000, day = 1440000 } -- of a bucket, ms

local function text(number)
  return string.format('%.0f', number)
end

local function time(offset)
  local clock = redis.call('TIME')
  return tonumber(clock[1]) * 1000 + math.floor(tonumber(clock[2]) / 1000) + tonumber(offset)
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

local function listed(packed)
  return packed and packed ~= '' and cmsgpack.unpack(packed) or {}
end

local function named(counter, user)
  return counter:sub(-6) == ':each:' and counter .. (user or '') or counter
end

-- Kind, window, subject, target.
local function parts(counter)
  return counter:match('^(%a):(%a*):([%a_]+):(.*)$')
end

-- Whether a request by `who` (project, key, route) for `user` is one that the counter counts.
local function counts(subject, target, who, user)
  if subject == 'tenant' then
    return true
  elseif subject == 'project' then
    return who[1] == target
  elseif subject == 'key' then
    return who[2] == target
  elseif subject == 'model' then
    return who[3] == target
  end
  return user and user ~= '' and user == target
end

-- Whether a budget's period, as { start, end }, has begun in Redis and holds a moment.
local function holds(period, moment)
  return period[1] and moment >= tonumber(period[1]) and moment < tonumber(period[2])
end

-- All counters of a tenant, with the time until which they may live: they can't be found by their keys in a cluster.
local function remember(tenant, counter, now, life)
  local index = tenant .. ':counters'
  redis.call('ZREMRANGEBYSCORE', index, '-inf', text(now))
  redis.call('ZADD', index, text(now + life), counter)
  redis.call('PEXPIRE', index, 34 * 86400000)
end

-- A window's bucket gets more or less, but never below nothing. One that has left the window is left alone.
local function shift(key, bucket, difference)
  local held = difference ~= 0 and redis.call('HGET', key, bucket)
  if held then
    difference = math.max(difference, 0 - tonumber(held))
    redis.call('HINCRBY', key, bucket, text(difference))
    redis.call('HINCRBY', key, 'n', text(difference))
  end
end

-- As `shift`, for a request that the window may have lost, with its bucket or as a whole.
local function put(tenant, counter, width, admitted, amount, now)
  local bucket = math.floor(admitted / width)
  if bucket < math.floor(now / width) - BUCKETS then
    return
  end
  local key = tenant .. ':' .. counter
  local oldest = tonumber(redis.call('HGET', key, 'oldest') or text(bucket))
  redis.call('HINCRBY', key, text(bucket), text(amount))
  redis.call('HINCRBY', key, 'n', text(amount))
  redis.call('HSET', key, 'oldest', text(math.min(oldest, bucket)))
  redis.call('PEXPIRE', key, (BUCKETS + 2) * width)
  remember(tenant, counter, now, (BUCKETS + 2) * width)
end

local function take_slot(tenant, counter, id, expiry)
  local key = tenant .. ':' .. counter
  if redis.call('ZADD', key, expiry, id) == 1 and redis.call('ZCARD', key) == 1 then
    redis.call('ZADD', tenant .. ':counters', 'inf', counter)
  end
end

local function free_slot(tenant, counter, id)
  local key = tenant .. ':' .. counter
  if redis.call('ZREM', key, id) == 1 and redis.call('EXISTS', key) == 0 then
    redis.call('ZREM', tenant .. ':counters', counter)
  end
end

-- Tell of the thresholds that a budget has crossed and that were not told of in this period.
local function tell(key, counter, watch, spent, alerts, tenant_id, now)
  local amount, thresholds = watch:match('^(%d+)(.*)$')
  amount = tonumber(amount)
  local held = redis.call('HMGET', key, 'told', 'start', 'limit')
  local told = tonumber(held[1] or '0')
  local _, window, subject, target = parts(counter)
  for percent in thresholds:gmatch('%d+') do
    local threshold = tonumber(percent)
    if threshold > told and spent * 100 >= threshold * amount then
      redis.call('XADD', alerts, '*', 'alert', string.format(
        '{"limit_id":"%s","tenant_id":"%s","subject":"%s","target":%s,"window":"%s","period_start_ms":%s,'
          .. '"threshold":%d,"spent":%.0f,"amount":%.0f,"at_ms":%.0f}',
        held[3], tenant_id, subject == 'each' and 'end_user' or subject, cjson.encode(target), window, held[2],
        threshold, spent, amount, now))
      redis.call('HSET', key, 'told', percent)
    end
  end
end

-- Move what a request's counters hold of it by these differences, and free its slots.
local function change(tenant, tenant_id, id, request, by, alerts, now)
  for _, counter in ipairs(listed(request.counters)) do
    counter = named(counter, request.user)
    local key = tenant .. ':' .. counter
    local kind, window = parts(counter)
    if kind == 'b' then
      local held = redis.call('HMGET', key, 'start', 'end', 'watch')
      if holds(held, request.admitted) then
        local spent = redis.call('HINCRBY', key, 'spent', text(by.spent))
        redis.call('HINCRBY', key, 'reserved', text(by.reserved))
        if held[3] and spent > 0 then
          tell(key, counter, held[3], spent, alerts, tenant_id, now)
        end
      end
    elseif kind == 'c' then
      free_slot(tenant, counter, id)
    else
      shift(key, text(math.floor(request.admitted / WIDTH[window])), kind == 'r' and by.requests or by.tokens)
    end
  end
end
